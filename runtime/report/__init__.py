"""What a run reports, during training and at the end.

`live_table`, `metrics` and `summary` show losses and ranks; `recording` brings the events of all
ranks together on one `clock`, and `utilisation` says what they spent their time on; `page` shows it
all as report.html. `stage_seconds` has the time of each stage, which `first_minibatches` looks at
early, `expectation` and `where_time_is` beside the plan. `pipedream.runtime.run_end` has all of it
written: begin there.
"""
