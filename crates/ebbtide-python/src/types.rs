//! Arguments and results as Python's type checkers see them.

use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;
use pyo3::{type_hint_identifier, type_hint_subscript, type_hint_union};

const TENSOR: PyStaticExpr = type_hint_identifier!("torch", "Tensor");

macro_rules! seen_as {
    ($(#[$doc:meta])* $name:ident, $hint:expr) => {
        $(#[$doc])*
        pub(crate) struct $name<'py>(pub(crate) Bound<'py, PyAny>);

        impl<'a, 'py> FromPyObject<'a, 'py> for $name<'py> {
            type Error = std::convert::Infallible;
            const INPUT_TYPE: PyStaticExpr = $hint;
            fn extract(object: Borrowed<'a, 'py, PyAny>) -> Result<Self, Self::Error> {
                Ok(Self(object.to_owned()))
            }
        }

        impl<'py> IntoPyObject<'py> for $name<'py> {
            type Target = PyAny;
            type Output = Bound<'py, PyAny>;
            type Error = std::convert::Infallible;
            const OUTPUT_TYPE: PyStaticExpr = $hint;
            fn into_pyobject(self, _: Python<'py>) -> Result<Self::Output, Self::Error> {
                Ok(self.0)
            }
        }
    };
}

seen_as! {
    /// A tensor of torch.
    Tensor, TENSOR
}

seen_as! {
    /// Any number of tensors.
    Tensors, type_hint_subscript!(type_hint_identifier!("collections.abc", "Iterable"), TENSOR)
}

seen_as! {
    /// Says whether a tensor is to be swapped.
    Decide, type_hint_subscript!(
        type_hint_identifier!("collections.abc", "Callable"),
        PyStaticExpr::List { elts: &[TENSOR] },
        type_hint_identifier!("builtins", "bool")
    )
}

seen_as! {
    /// Finds the group that a region belongs to.
    Find, type_hint_subscript!(
        type_hint_identifier!("collections.abc", "Callable"),
        PyStaticExpr::List { elts: &[] },
        type_hint_union!(
            <crate::group::Group as pyo3::PyTypeInfo>::TYPE_HINT,
            type_hint_identifier!("builtins", "None")
        )
    )
}

seen_as! {
    /// Numbers by name.
    Numbers, type_hint_subscript!(
        type_hint_identifier!("builtins", "dict"),
        type_hint_identifier!("builtins", "str"),
        type_hint_union!(
            type_hint_identifier!("builtins", "int"),
            type_hint_identifier!("builtins", "float")
        )
    )
}
