"""The tests. Hypothesis measures no time here: a busy machine is not a failing test."""

from hypothesis import HealthCheck, settings

settings.register_profile("arachne", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("arachne")
