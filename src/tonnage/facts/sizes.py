"""Numbers of this code that both it and the planner go by."""

READ_AT_ONCE_BYTES = 1 << 26  # of rows of a weight that are read, and quantised, at a time
VOCAB_BLOCK = 16384  # words at a time, of which the chunked loss takes exponentials and forms a trained head's gradient
SAVE_GIB_S = 0.5  # a checkpoint to a disk that nodes share: an assumption, on the slow side
SAVE_FILE_BYTES = 2 * 2**30  # a rank collects tensors of a checkpoint up to this size before it writes a file
# selective checkpointing computes again what takes fewer multiplications a number than this, as an adapter's products of
# its rank: they cost next to nothing, and to keep them as much as others
LEAST_KEPT_INPUTS = 128
FLOAT8_MULTIPLE = 16  # FP8 units multiply matrices whose dimensions are multiples of this
PROCESS_WITHOUT_CUDA_GIB = 0.5  # Python, torch, transformers: measured
