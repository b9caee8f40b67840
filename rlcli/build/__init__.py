"""Build a run's parts from its configuration, one file a group; nothing below knows the configuration."""
