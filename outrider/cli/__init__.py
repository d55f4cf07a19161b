"""The command line: `outrider` starts services, asks them, measures them. Standard output is data."""

import os

# To be set before gRPC is imported, whose C core logs each connection that breaks beside our own error.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
