"""The first tables of the shop."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """The order."""

    initial = True
    dependencies = []
    operations = [
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("item", models.CharField(max_length=100)),
                ("receipt_sent", models.BooleanField(default=False)),
                ("wrapped", models.BooleanField(default=False)),
                ("counted", models.BooleanField(default=False)),
            ],
        ),
    ]
