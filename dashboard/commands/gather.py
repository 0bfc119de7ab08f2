"""stepsplit gather, by the collectors."""

from stepsplit.dashboard.commands.collect import collectors_command

command = collectors_command("gather", "Bring together what the hosts of a run wrote.")
