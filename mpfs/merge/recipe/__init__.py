"""The recipe: mergekit's YAML, read strictly; see docs/recipes.md."""

from typing import TYPE_CHECKING

from mpfs.deferred import names

if TYPE_CHECKING:
    from mpfs.merge.recipe.documents import MAX_RECIPE_BYTES, load_recipe, load_recipes, parse_recipe, parse_recipes
    from mpfs.merge.recipe.grammar import recipe_from_mapping
    from mpfs.merge.recipe.model import DTYPES, Recipe, RecipeModel, RecipeModule, RecipeSlice
    from mpfs.merge.recipe.values import Choice, Value, depends_on_layer, evaluate
else:
    __getattr__, __dir__ = names(
        __name__,
        {
            "mpfs.merge.recipe.documents": (
                "MAX_RECIPE_BYTES",
                "load_recipe",
                "load_recipes",
                "parse_recipe",
                "parse_recipes",
            ),
            "mpfs.merge.recipe.grammar": ("recipe_from_mapping",),
            "mpfs.merge.recipe.model": ("DTYPES", "Recipe", "RecipeModel", "RecipeModule", "RecipeSlice"),
            "mpfs.merge.recipe.values": ("Choice", "Value", "depends_on_layer", "evaluate"),
        },
    )

__all__ = [
    "DTYPES",
    "MAX_RECIPE_BYTES",
    "Choice",
    "Recipe",
    "RecipeModel",
    "RecipeModule",
    "RecipeSlice",
    "Value",
    "depends_on_layer",
    "evaluate",
    "load_recipe",
    "load_recipes",
    "parse_recipe",
    "parse_recipes",
    "recipe_from_mapping",
]
