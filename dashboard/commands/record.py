"""stepsplit record, by the collectors."""

from stepsplit.dashboard.commands.collect import collectors_command

command = collectors_command("record", "Run a training as it is and record some of its steps.")
