"""How a trainer reaches the workers' control plane: over HTTP, in this process, or several servers as one."""
