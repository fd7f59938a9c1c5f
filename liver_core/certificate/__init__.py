"""Position-keyed hash of training state: the same for every layout, different for any misplaced or changed element.

Sums over ranks modulo 2^64 give one number for each parameter and kind. It proves that the data plane moved what the
mapping said, not that the mapping is right: both sides use the same boxes.
"""

from liver_core.certificate.certificate_plan import CertificatePlan
from liver_core.certificate.mixing import MASK, chained_sums

__all__ = ["MASK", "CertificatePlan", "chained_sums"]
