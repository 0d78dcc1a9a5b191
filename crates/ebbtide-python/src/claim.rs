//! A share in a span, held by what autograd was given for a tensor.

use std::sync::Arc;

use crate::graveyard::Graveyard;
use crate::held::Held;

/// Keeps a span, and the group it belongs to. Its end is noted for the hub, wherever it comes.
pub(crate) struct Claim {
    pub(crate) held: Arc<Held>,
    pub(crate) group: u64,
    graveyard: Arc<Graveyard>,
}

impl Claim {
    pub(crate) fn new(held: Arc<Held>, group: u64, graveyard: Arc<Graveyard>) -> Self {
        Self { held, group, graveyard }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.graveyard.claim_ended(self.group);
    }
}
