"""The command line: `outrider` starts services, asks them, measures them. Standard output is data."""

import os

# Set before gRPC is imported. Its C core writes a line of its own when a connection breaks, beside our error.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
