"""Random valid graphs: generated, compared with onnxruntime and central differences, and shrunk after a failure.

==============  ==================================================================================
`building`      construction of a graph node by node; each new node is run
`operators`     random nodes, one function for each operator
`fused`         packed weights, experts, grouped queries, operators of diffusion models
`quantized`     operators on integers that stand for floats
`structures`    patterns of several nodes: updates in place, masked attention, recurrent layers, If, Loop, Scan
`cases`         a graph with its inputs at two batch sizes: generation, storage, loss, conversion to float64
`oracle`        onnxruntime without its optimizations, or the reference implementation of ONNX
`expanding`     definitions of operators without a kernel in onnxruntime, by operators of ONNX
`smoothing`     smooth forms of quantized graphs, for the slopes of straight-through gradients
`checks`        the properties that every graph must have
`shrinking`     reduction of a failure to a minimal graph that fails in the same way
`workers`       processes that check graphs; a crash or a hang is a failure of one graph and does not end the run
==============  ==================================================================================

``python -m random_graphs --count 1000 --seed 7`` (in ``tests``) checks the graphs of the seeds 7 to 1006.
"""
