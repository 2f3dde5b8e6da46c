"""Environment variables of draftlab's processes, which OpenMP and oneDNN read at torch's import.

Threads that spin while they wait slow a busy machine. Each shape of a product that oneDNN keeps
takes megabytes, and the shapes of a training seldom come twice.
"""

PROCESS_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
}
