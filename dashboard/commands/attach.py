"""stepsplit attach, by the collectors."""

from stepsplit.dashboard.commands.collect import collectors_command

command = collectors_command("attach", "Record some steps of a job that runs.")
