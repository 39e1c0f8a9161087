"""A trace as a graph: names, the networkx mirror, conversion to torch.fx, printing."""
