"""Exit codes. "Slower" and "broken" never share one."""

OK = 0
GATE = 1
USAGE = 2
INCORRECT = 3
UNSUPPORTED = 4
NOTHING_RAN = 5
INTERRUPTED = 130
BROKEN_PIPE = 141  # what a shell shows for a program that SIGPIPE ended
