"""What is to be predicted: a transformer, its layout over GPUs, how it is trained, on what."""
