"""Starts a toy, prints its pid, and waits to be killed."""

import sys
import time

from outrider.runtime.children import ServiceProcess

if __name__ == "__main__":
    child = ServiceProcess.start("drafter", "toy_service", sys.argv[1:])
    if "--load-s" not in sys.argv:
        child.wait_ready(250)
    print(child.pid, flush=True)
    time.sleep(600)
