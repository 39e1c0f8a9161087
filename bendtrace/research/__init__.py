"""Workflows, analysers and harvests, built on insertions.

`debug/calls.py` reads the forms in which people hold the inputs of a model. Analysers, workflows
and harvests use the public part of a `BendedModule`, and insert in groups (`insert/registry.py`).
An analyser (`analyser.py`) is an interjection that observes. Its state consists of statistics
(`streaming.py`), each of which can be merged. An analyser made of others (`composed.py`) has the
interface of its members. A workflow inserts something at sites (`_sites.py`), calls the model,
and restores it (`debug/preserved_state.py`). Its results are tables (`_sites.py`) with a heat map
for notebooks (`show/paint.py`). A harvest collects rows in an interjection (`collecting.py`), and
writes them shard by shard, so that the files are valid at all times.
"""
