"""Workers: what runs the jobs of one model, one at a time.

`worker` has the interface (`Worker`) and its vocabulary (`Job`, `Step`, `Steps`, `JobError`); `thread_worker` the
implementation on an operating-system thread, `thread_pool` the threads; `simulated_worker` the implementation in
simulated time. `core_sharing` divides the cores among the threads that compute. Nothing here knows models, sessions or
caches. A worker for another kind of device or process goes here.
"""
