"""Why a job does not run, or is not finished: one module for each kind of rule."""
