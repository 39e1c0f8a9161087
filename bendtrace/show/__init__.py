"""Pictures, the viewer, the printed tree of a model, differences of runs.

`scene.py` turns entries of a log into a *scene*: it nests them in boxes, groups repetitions and
closes boxes, and creates nodes and edges. `layout.py` lays out each box separately, and
`paint.py` paints marks on a canvas that `canvas.py` writes as SVG and `picture.py` as PNG or PDF.
`viewer/` is a page without dependencies. `matching.py` aligns two logs by place, module and
source.

The printed tree folds paths back into the source that they came from. `walks.py` says which
branches and loops each path through a program passed, how often calls took it, how their lines
read and what is listed under each side. `model_tree.py` overlays the walks of a program and counts,
`outline.py` holds and prints the result, and `model_tree.py` also says by what the programs differ.
`bended.tree` (`model_tree.py`) can be printed as text, or taken as JSON, a networkx graph or a
picture. `bended.graph` (`state_graph.py`) joins the same walks at their states.
`bended.coverage()` (`outline.py`) lists the branches of which one side was never reached. Both
pictures are scenes for the painter of runs.
"""
