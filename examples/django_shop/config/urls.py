"""The addresses of the shop."""

from django.urls import path
from shop import views

urlpatterns = [
    path("orders/<str:item>/", views.order),
    path("orders/<str:item>/gift/", views.gift),
    path("jobs/<int:id>/", views.job_status, name="job"),
]
