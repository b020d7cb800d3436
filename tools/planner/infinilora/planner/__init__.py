"""Simulator and capacity planner: the pure policies of the services on virtual time."""
