"""Where the replicas of tests keep their anchors; the fixture `both_policies` turns it."""

on_device = False
