"""Reads a compiled step for what it does otherwise than was asked of it."""

from sfpo_jax.auditing._audit import audit as audit
from sfpo_jax.auditing._command import add_audit_arguments as add_audit_arguments
from sfpo_jax.auditing._command import run_audit as run_audit
from sfpo_jax.auditing._report import AuditReport as AuditReport
from sfpo_jax.auditing._report import Finding as Finding
