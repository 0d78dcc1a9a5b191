//! Placeholder until the accelerator is written.
use pyo3::prelude::*;
use crate::{error::setting, hub::Hub, unit::Unit};
pub(crate) fn open(_: &Hub, kind: &str, _: u32) -> PyResult<Box<dyn Unit>> {
    Err(setting(&format!("no accelerator {kind}"), "use the CPU"))
}
