"""From a model folder or file to a configuration and parameters."""
