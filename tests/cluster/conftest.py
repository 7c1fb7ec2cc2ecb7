"""The demo model and its references, as the parity tests have them."""

from baton.tests.parity.conftest import eagle3_dir, reference_greedy, smollm2_dir, smollm2_tokenizer

__all__ = ["eagle3_dir", "reference_greedy", "smollm2_dir", "smollm2_tokenizer"]
