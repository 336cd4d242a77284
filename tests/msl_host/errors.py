"""What goes wrong."""


class MSLError(RuntimeError):
    """A kernel that Metal would not take, or that did what Metal does not define."""


class MSLCompileError(MSLError):
    """The source does not compile; the message holds the compiler's errors with file and line."""


class MSLRunError(MSLError):
    """The kernel misbehaved; the message holds one line for each thing found, with file and line."""
