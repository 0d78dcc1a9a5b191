//! The error type of the Candle front end.

use std::fmt;

/// Anything that can go wrong in a step.
///
/// [`Error::hint`] is apart from the message: a program prints it on a line of its own. Inside a
/// function that returns Candle's own `Result`, `?` converts.
pub struct Error(Box<Kind>);

/// Kinds are private, so that a new one breaks nobody.
#[derive(Debug)]
pub(crate) enum Kind {
    Candle { layer: Option<String>, source: candle_core::Error },
    Engine(ebbtide_core::Error),
    Tier(ebbtide_core::BackendError),
    Setting { message: String, hint: String },
    UnlistedCapture { layer: String, what: String },
    Random { layer: String },
    RecomputeDiffers { layer: String },
    SecondBackward,
    NotTracked,
    SplitGradient { first: String, second: String, shape: Vec<usize> },
    TooManyLayers { layer: String, known: usize },
    UnusedPolicies { seen: usize, known: usize },
    NoOutput { layer: String },
    PutAside { layer: String },
    Device { layer: String, device: String },
    Trace(ebbtide_plan::TraceError),
    NoPlan { message: String, hint: String },
    Misfit(ebbtide_plan::Misfit),
    NotTraced,
}

impl Error {
    pub(crate) fn new(kind: Kind) -> Self {
        Self(Box::new(kind))
    }

    pub(crate) fn in_layer(layer: &str) -> impl FnOnce(candle_core::Error) -> Self {
        let layer = Some(layer.to_string());
        move |source| Self::new(Kind::Candle { layer, source })
    }

    /// What the user can do about it, if anything is known.
    pub fn hint(&self) -> Option<&str> {
        Some(match &*self.0 {
            // The dtype of what a dropped or moved storage leaves behind.
            Kind::Candle { source, .. } if source.to_string().contains("F8E8M0") => {
                "bytes were read that are dropped or away: a tensor was put aside (return it as an \
                 output), an input's memory is captured under another handle (pass it as an input), \
                 or the layer's operations depend on sizes or change from step to step (build with \
                 probe(false))"
            }
            Kind::Candle { .. } => return None,
            Kind::Engine(error) => return error.hint(),
            Kind::Tier(error) => return error.hint(),
            Kind::Setting { hint, .. } | Kind::NoPlan { hint, .. } => hint,
            Kind::UnlistedCapture { .. } => {
                "name every variable the closure uses in `params`, and pass every other tracked \
                 tensor as an input; a layer can't run inside another one"
            }
            Kind::Random { .. } => "use keep or swap for this layer, or pass its masks as inputs",
            Kind::RecomputeDiffers { .. } => {
                "the closure must compute the same from the same inputs until backward: no random \
                 numbers, no parameter changed in between; else use keep or swap for this layer"
            }
            Kind::SecondBackward => "run the forward again in a new step",
            Kind::NotTracked => "compute the loss from the outputs of this step's layers",
            Kind::SplitGradient { .. } => {
                "compute that tensor inside a layer (`Step::layer`), so that its gradient can be \
                 added up in the order Candle would"
            }
            Kind::TooManyLayers { .. } | Kind::UnusedPolicies { .. } => {
                "make the policies for as many layers as the model calls"
            }
            Kind::NoOutput { .. } => "return at least one tensor from the closure",
            Kind::PutAside { .. } => "return it as an output of the layer",
            Kind::Device { .. } => "move the model to the CPU",
            Kind::Trace(error) => error.hint(),
            Kind::Misfit(error) => error.hint(),
            Kind::NotTraced => "run a step after `Swap::start_tracing` first",
        })
    }

    /// A setting is wrong; nothing has been done yet.
    pub fn is_setting(&self) -> bool {
        match &*self.0 {
            Kind::Engine(error) => error.is_setting(),
            Kind::Setting { .. } | Kind::Tier(_) | Kind::NoPlan { .. } | Kind::Misfit(_) => true,
            _ => false,
        }
    }

    /// Recompute was refused since the layer draws random numbers or changed in between.
    pub fn is_recompute_refused(&self) -> bool {
        matches!(&*self.0, Kind::Random { .. } | Kind::RecomputeDiffers { .. })
    }

    /// No plan fits the budget.
    pub fn is_no_plan(&self) -> bool {
        matches!(&*self.0, Kind::NoPlan { .. })
    }

    /// A copy to or from the tier failed.
    pub fn is_copy(&self) -> bool {
        matches!(&*self.0, Kind::Engine(error) if error.is_copy())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.0 {
            Kind::Candle { layer: Some(layer), .. } => write!(f, "layer `{layer}` failed"),
            Kind::Candle { layer: None, .. } => f.write_str("Candle failed outside the layers"),
            Kind::Engine(error) => error.fmt(f),
            Kind::Tier(error) => error.fmt(f),
            Kind::Setting { message, .. } | Kind::NoPlan { message, .. } => f.write_str(message),
            Kind::UnlistedCapture { layer, what } => {
                write!(f, "layer `{layer}` uses {what} that it does not list")
            }
            Kind::Random { layer } => {
                write!(f, "layer `{layer}` draws random numbers, so it can't be recomputed")
            }
            Kind::RecomputeDiffers { layer } => {
                write!(f, "layer `{layer}`, recomputed, differs from its forward")
            }
            Kind::SecondBackward => f.write_str("this step's backward has already run"),
            Kind::NotTracked => f.write_str("the loss depends on nothing that tracks gradients"),
            Kind::SplitGradient { first, second, shape } => write!(
                f,
                "a tensor of shape {shape:?} computed outside the layers reaches both {first} and \
                 {second}"
            ),
            Kind::TooManyLayers { layer, known } => {
                write!(f, "layer `{layer}` is one more than the {known} that the policies name")
            }
            Kind::UnusedPolicies { seen, known } => {
                write!(f, "the policies name {known} layers, the step ran {seen}")
            }
            Kind::NoOutput { layer } => write!(f, "layer `{layer}` returned no tensor"),
            Kind::PutAside { layer } => {
                write!(f, "the loss uses a tensor that layer `{layer}` put aside")
            }
            Kind::Device { layer, device } => {
                write!(f, "layer `{layer}` got a tensor on {device}; only CPU tensors are swapped")
            }
            Kind::Trace(error) => error.fmt(f),
            Kind::Misfit(error) => error.fmt(f),
            Kind::NotTraced => f.write_str("no step of this model has been traced yet"),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &*self.0 {
            Kind::Candle { source, .. } => Some(source),
            Kind::Engine(error) => std::error::Error::source(error),
            Kind::Tier(error) => std::error::Error::source(error),
            Kind::Trace(error) => std::error::Error::source(error),
            _ => None,
        }
    }
}

impl From<candle_core::Error> for Error {
    fn from(source: candle_core::Error) -> Self {
        Self::new(Kind::Candle { layer: None, source })
    }
}

impl From<ebbtide_core::Error> for Error {
    fn from(error: ebbtide_core::Error) -> Self {
        Self::new(Kind::Engine(error))
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        Self::wrap(error)
    }
}
