"""Commands that core's `weightwire` script finds through the entry-point group `weightwire.commands`."""
