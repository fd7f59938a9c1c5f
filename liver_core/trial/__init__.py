"""Is a job ready for LiveR? Builds and steps it on this machine, without service and agents, and says what is missing.

`command` is what `liver jobs try` starts; `one_process` makes the checks one after the other, `other_layout` runs the
job once more in as many processes as a layout has ranks, both on a `trial_world`; `findings` is what they report.
"""
