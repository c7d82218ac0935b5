"""Exit codes. "Slower" and "broken" never share one."""

OK = 0
GATE = 1
USAGE = 2
INCORRECT = 3
UNSUPPORTED = 4
NOTHING_RAN = 5
INTERNAL = 70  # an error that nobody foresaw, of this program or of a paper's code
INTERRUPTED = 130
BROKEN_PIPE = 141  # what a shell shows for a program that SIGPIPE ended

# What `--json` calls a command that ends with such a code and has printed nothing else.
NAMES = {
    GATE: "GateFailed",
    USAGE: "UsageError",
    INCORRECT: "IncorrectResultError",
    UNSUPPORTED: "UnsupportedError",
    NOTHING_RAN: "NothingRan",
    INTERNAL: "InternalError",
    INTERRUPTED: "Interrupted",
}
