"""Numbers of this code that both it and the planner go by."""

VOCAB_BLOCK = 16384  # words of a trained head whose gradient the chunked loss forms at a time
NORM_PARTS = 8  # of the vocabulary, whose exponentials it takes one after another
SAVE_FILE_BYTES = 2 * 2**30  # a rank collects tensors of a checkpoint up to this size before it writes a file
PROCESS_WITHOUT_CUDA_GIB = 0.5  # Python, torch, transformers: measured
