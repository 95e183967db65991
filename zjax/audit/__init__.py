"""The proof from the compiled program: what each device holds, sends and waits for, on hardware that need not be there."""

from zjax.audit.compile import AuditError
from zjax.audit.report import Audit
from zjax.audit.run import audit, audit_here, audit_program, audit_recipe
