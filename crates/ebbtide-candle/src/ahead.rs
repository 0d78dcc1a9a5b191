//! Looking at a layer before it runs for the first time, so that what is learnt costs no memory
//! beside the layer's own.
//!
//! Without a bound on memory a layer is probed right after its forward, on a few samples more. With
//! one, that would be the most that a step ever needs. So here the few samples run alone, a part of
//! the batch at a time, and the whole batch after them.

use std::time::Instant;

use candle_core::{Tensor, Var};
use ebbtide_core::LayerId;
use ebbtide_store::Row;

use crate::error::Error;
use crate::graph::Scope;
use crate::probe::{Form, Function, probe_ahead, repeats_ahead};
use crate::segment::lend_inputs;
use crate::swap::Swap;

/// Finds out what backward reads of a layer and whether it repeats, unless that is known.
///
/// # Errors
/// The closure fails on some samples in a way that a smaller batch does not explain.
pub(crate) fn look_ahead(
    swap: &Swap,
    name: &str,
    layer: LayerId,
    params: &[(String, Var)],
    inputs: &[&Tensor],
    function: &Function<'_>,
) -> Result<(), Error> {
    if !swap.inner().probes() || swap.inner().knows(layer) {
        return Ok(());
    }
    let started = Instant::now();
    let (inputs, loans) = lend_inputs(inputs).map_err(Error::in_layer(name))?;
    let scope = Scope { layer: name, inputs: &inputs, params, before: 0 };
    let form = look_for_dead(swap, layer, &scope, function)?;
    if let Some(form) = form {
        let started = Instant::now();
        let repeats = repeats_ahead(function, &scope, &form)?;
        swap.inner().learn_repeats(layer, &form.signature, repeats, started);
    }
    drop(loans);
    swap.inner().span(Row::Compute, || format!("{name} probe"), started);
    Ok(())
}

fn look_for_dead(
    swap: &Swap,
    layer: LayerId,
    scope: &Scope<'_>,
    function: &Function<'_>,
) -> Result<Option<Form>, Error> {
    let started = Instant::now();
    let mut budget = swap.inner().probe_budget();
    let known = |signature: &_| swap.inner().forms_like(signature);
    let form = probe_ahead(function, scope, known, &mut budget)?;
    if let Some(form) = &form {
        swap.inner().learn_form(layer, form, budget.step, started);
    }
    Ok(form)
}
