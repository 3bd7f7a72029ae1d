"""Tests of dpmac, which is no part of what is installed."""

import os

# Before any library is loaded, and for every process that a test starts: threads that wait for one
# another at tensors this small took three quarters of the time of two workers on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
