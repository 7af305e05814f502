"""Complete tasks of the example configs, written with the public API alone."""
