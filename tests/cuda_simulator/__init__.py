"""A second simulator of training jobs: host launches, CUDA streams, NCCL; writes Kineto traces.

It shares no code, and no rule about what held up what, with the analyzer or `tests/simulator`.
"""
