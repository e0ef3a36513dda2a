#!/usr/bin/env python3
"""A program that opens libllama itself, by ctypes:  opened.py LIBLLAMA"""

import ctypes
import sys

library = ctypes.CDLL(sys.argv[1])
library.llama_free_model(None)
print("opened")
