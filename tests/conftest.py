"""What every test needs."""

import signal

# A shell's background job ignores SIGINT, and hands that on to its children; the tests of interrupts need the default.
signal.signal(signal.SIGINT, signal.default_int_handler)
