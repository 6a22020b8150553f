"""cuda: a step on one GPU: buffers that never move, kernels, captured graphs.  Chooses no rows."""
