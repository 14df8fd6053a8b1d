"""The self-test: what Outrider promises, checked on the device at hand, and what that device is best set to.

`checks` lists the checks. Each runs in a process of its own (`check_process`), so that a crash or a hang is a finding
like any other; `runner` starts the processes one after the other. `exactness`, `stability` and `speed` are the checks
themselves: functions from a `Subject` (the models under test) to a `Finding`. `report` says in words what was found,
and is the JSON that somebody attaches to a report: it has neither paths nor prompts. `stored_report` keeps the last one
for `outrider doctor`.

A new check is a function in one of these three modules and a row in `checks`; a test shows that it fails on a runtime
that was broken on purpose.
"""
