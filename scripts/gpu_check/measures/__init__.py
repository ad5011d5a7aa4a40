"""What is measured: functions of a Setting that return a Measured, each in a process of its own."""
