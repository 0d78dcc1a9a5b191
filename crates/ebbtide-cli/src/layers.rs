//! The one seam between the model and ebbtide: who runs a layer.

use candle_core::{Result as CandleResult, Tensor, Var};

use crate::failure::Failure;

/// Runs the layers of a model. The model's code is the same under all of them.
pub(crate) trait Layers<'a> {
    /// Runs `f` on `input` as the layer `name`, whose variables are `params`.
    fn layer<F>(
        &mut self,
        name: &str,
        params: &[(String, Var)],
        input: &Tensor,
        f: F,
    ) -> Result<Tensor, Failure>
    where
        F: Fn(&Tensor) -> CandleResult<Tensor> + 'a;
}

/// Calls the layer and nothing else: what a Candle program without ebbtide does.
#[derive(Debug)]
pub(crate) struct Plain;

impl<'a> Layers<'a> for Plain {
    fn layer<F>(
        &mut self,
        _name: &str,
        _params: &[(String, Var)],
        input: &Tensor,
        f: F,
    ) -> Result<Tensor, Failure>
    where
        F: Fn(&Tensor) -> CandleResult<Tensor> + 'a,
    {
        Ok(f(input)?)
    }
}

/// Runs a layer and lets go of what it saved: nobody will ask for gradients, and no more than one
/// layer's activations are in memory.
#[derive(Debug)]
pub(crate) struct Untracked;

impl<'a> Layers<'a> for Untracked {
    fn layer<F>(
        &mut self,
        _name: &str,
        _params: &[(String, Var)],
        input: &Tensor,
        f: F,
    ) -> Result<Tensor, Failure>
    where
        F: Fn(&Tensor) -> CandleResult<Tensor> + 'a,
    {
        Ok(f(&input.detach())?.detach())
    }
}
