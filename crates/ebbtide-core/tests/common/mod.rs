//! A store that tests share with an engine.

use std::cell::RefCell;
use std::rc::Rc;

use ebbtide_core::model::ModelStore;
use ebbtide_core::{Failed, Outcome, Store, StoreStats, Ticket};

/// A store that the test can look into while an engine owns it.
#[derive(Clone, Default)]
pub(crate) struct Shared(pub(crate) Rc<RefCell<ModelStore>>);

impl Store<Vec<u8>> for Shared {
    type Slot = u64;
    fn put(&mut self, block: Vec<u8>) -> Result<Ticket, Failed<Vec<u8>>> {
        self.0.borrow_mut().put(block)
    }
    fn get(&mut self, slot: &u64, block: Vec<u8>) -> Result<Ticket, Failed<Vec<u8>>> {
        self.0.borrow_mut().get(slot, block)
    }
    fn is_done(&mut self, ticket: Ticket) -> bool {
        self.0.borrow_mut().is_done(ticket)
    }
    fn wait(&mut self, ticket: Ticket) -> Outcome<Vec<u8>, u64> {
        self.0.borrow_mut().wait(ticket)
    }
    fn discard(&mut self, slot: u64) {
        self.0.borrow_mut().discard(slot);
    }
    fn stats(&self) -> StoreStats {
        self.0.borrow().stats()
    }
}
