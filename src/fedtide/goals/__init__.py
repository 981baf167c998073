"""Goals of commands: worlds whose answers are known, and claims about what a command finds in them."""
