//! Whole training-like runs of the engine in a simulated world, drawn from a seed, against an oracle
//! that knows every byte.
//!
//! | module | what is there |
//! | --- | --- |
//! | `features` | what a run may contain; the mix of one run |
//! | `plan` | a run as data |
//! | `draw`, `order` | a plan, drawn from a mix |
//! | `scenario` | a plan with its machine, bounds and faults |
//! | `player` | plays the steps; what happens after an error |
//! | `forward`, `backward` | one layer's part of it |
//! | `named` | steps driven by names and layers |
//! | `oracle` | what each storage holds |
//! | `outcome`, `sweep` | what comes out, of one run and of many |
//!
//! # What must hold
//!
//! * No report of the world: order, values, life of memory.
//! * Without faults no error, except those that the plan provokes; every group comes home, within a
//!   bound of calls and of time.
//! * With faults any call may be an error, and the step can be given up or gone on with; afterwards
//!   nothing is leaked and the next step is right.
//! * No panic.

mod backward;
mod draw;
mod features;
mod forward;
mod named;
mod oracle;
mod order;
mod outcome;
mod plan;
mod player;
mod scenario;
mod sweep;

pub use features::{Feature, Mix};
pub use named::named;
pub use outcome::Outcome;
pub use plan::{Asks, Event, Misuse, Moment, Plan, Source, Step, Value, View, Visit};
pub use scenario::Scenario;
pub use sweep::{Sweep, sweep};
