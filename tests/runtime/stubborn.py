"""A child that neither announces itself nor obeys SIGTERM, or ends at once with a few last words."""

import signal
import sys
import time

if "--silent-end" in sys.argv:
    print("last words", file=sys.stderr)
    sys.exit(3)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
