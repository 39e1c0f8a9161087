"""Stepping, auditing, bisecting, searching for inputs, backward passes as records.

`backward.py` records a backward pass of torch's engine. While the run is captured,
`log/capture.py` notes which numbers torch gave to new nodes of the autograd graph during each op,
and marks where the graph of the run begins and ends; it keeps no node. `AutogradGraph` walks the
graph below the losses in the engine's order and names each node after its op. `backward` hooks
the nodes, runs the pass and removes the hooks. With `create_graph=True`, it marks the nodes that
are made while a node runs, so that the next pass knows them, and turns the record into a log
whose values are gradients, and so pictures, differences and storage work on it unchanged.

A stepped run (`stepping.py`) is visited: each visit runs the model's Python from its start to
some position under the recorder. A `Start` holds what the run can read (the parts of an
`Environment`) and the random generators as they were, and leads them back. An `EventVisit` (both in
`visit.py`) is an inserter that counts *events*, ends the run before one with `StopRun`, copies
the variables of the frames, and puts given values and answers in. It compares each event with the
one that an earlier visit has seen. `ValueCache` holds results of ops within a budget. The recorder
takes them (`Recorder.hand_over`) where it would carry out the op. Only results are kept that are
all that an op does: no views, no writes, no random numbers, nothing that requires grad.
`stepping.py` finds the event that a name, a line or a flow step stands for. `visit.py` writes
what is seen at each event as text while one visit goes through the run, and runs no code of the
values' classes; `stepping.py` makes the data of the viewer from that, and `show/viewer/events.js`
shows them.

`search.py` searches for inputs that take sides which no run took. A `Subject` (`search.py`) runs
the model on a candidate, from the same state each time (`preserved_state.py`), and reads which
questions the run asked and which sides it took: only that makes a find. `distance.py` does the
ops before a question again, with gradients, and gives how far the answer is from the other one.
`distance.py` also reads conditions from the source where the values became plain Python numbers
before. `search.py` knows which inputs may be tried (`Domain`), and goes downhill.
"""
