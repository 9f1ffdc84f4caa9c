"""Random valid graphs: made, checked against onnxruntime and central differences, and shrunk where a check fails.

==============  ==================================================================================
`building`      a graph that is built node by node; each node is run as it is added
`operators`     the operators that are drawn
`structures`    patterns of several nodes: updates in place, masked attention, recurrent layers, If, Loop, Scan
`cases`         a graph with its inputs at two batch sizes: generated, stored, given a loss, put into float64
`oracle`        onnxruntime without its optimizations, or the reference implementation of ONNX
`checks`        the properties that every graph must have
`shrinking`     from a failure to a minimal graph that fails in the same way
`workers`       processes that check graphs, so that a crash or a hang is a failure and not the end of the run
==============  ==================================================================================

``python -m random_graphs --count 1000 --seed 7`` (in ``tests``) checks the graphs of the seeds 7 to 1006.
"""
