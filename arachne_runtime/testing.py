"""Run a function on N real gloo ranks and collect what each returns."""
