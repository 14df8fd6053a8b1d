"""The self-test: checks Outrider's guarantees on this device, and finds the settings that suit it best.

`checks` lists the checks. Each runs in a process of its own (`check_process`), so that a crash or a hang is a finding
like any other; `runner` starts the processes one after the other. `exactness`, `stability` and `speed` are the checks
themselves: functions from a `Subject` (the models under test) to a `Finding`. `report` puts the findings into words,
and into JSON to attach to an issue, with neither paths nor prompts.

To add a check, add a function to one of these three modules and a row to `checks`, with a test that shows that it fails
on a runtime that was broken on purpose.
"""
